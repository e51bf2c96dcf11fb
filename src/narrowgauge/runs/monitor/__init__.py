"""What does a run need, and what does it report?"""
