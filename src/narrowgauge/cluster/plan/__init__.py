"""What will a run need, and how fast will it be?"""
