"""Hugging Face causal language models whose weights never all are in memory.

``presets``    a model's configuration, from a directory or by a preset's name
``meta``       the model itself, with parameters on the meta device
``structure``  its list of blocks, and what stands outside of it
``shards``     safetensors files: what is in them, and one tensor at a time
``conversion`` names and layouts on disk against those in the model, both ways
``sources``    where weights come from: a checkpoint, or random numbers
``export``     weights going back into a checkpoint directory
``adapters``   PEFT adapters: put in, begun, written, merged
``flops``      what a token costs
"""
