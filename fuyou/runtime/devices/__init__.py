"""Where blocks compute: a GPU, the CPU, or an accelerator that is emulated."""
