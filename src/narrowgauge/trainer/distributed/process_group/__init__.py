"""The process group: how ranks connect, make decisions and end together."""
