"""What does a recipe reach in a model, and how do attention, experts and the residual stream compute?"""
