"""How a run starts, resumes and ends."""
