"""Open a model, a store, and a device, and take steps. ``Engine`` is what a caller's loop holds."""
