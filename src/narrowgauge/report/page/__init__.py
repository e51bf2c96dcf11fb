"""What does the HTML page show?"""
