"""Uses of a trained model."""
