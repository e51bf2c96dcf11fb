"""Which part of the model and of the batch is of which rank?"""
