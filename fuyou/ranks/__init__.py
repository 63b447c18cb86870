"""The other ranks, as the engine sees them."""
