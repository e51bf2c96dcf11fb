"""Which torch is installed, why it cannot be imported, and which build would work."""
