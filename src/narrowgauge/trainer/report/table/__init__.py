"""The verdict as tables and sentences."""
