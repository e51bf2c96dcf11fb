"""What stands on the HTML page?"""
