"""The linear autoencoder for sequences: the optimal linear memory, in closed form."""

from .estimator import LinearAutoencoder

__all__ = ["LinearAutoencoder"]
