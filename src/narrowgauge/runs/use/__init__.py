"""What can be done with a trained model?"""
