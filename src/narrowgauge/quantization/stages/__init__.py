"""What some keys of a cast do to a tensor: each file holds one, with its mathematics."""
