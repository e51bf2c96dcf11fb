"""What lies below the rooms: the operating system, torch's own names, and words that all rooms share."""
