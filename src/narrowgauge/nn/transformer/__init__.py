"""What of a model does a recipe reach, and how do attention, experts and the residual stream compute?"""
