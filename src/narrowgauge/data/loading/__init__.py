"""In which order are tokens read, and how do they become batches?"""
