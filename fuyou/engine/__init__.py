"""The way in: opens a model, a store and a device, and takes steps."""
