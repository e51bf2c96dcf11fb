"""Communication between ranks, and the formats of what is sent."""
