"""Commands that look instead of training: check, profile, verify, evaluate, and the data of a run.

They measure the machine with the model, and print what they find."""
