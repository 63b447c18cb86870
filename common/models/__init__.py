"""Hugging Face models whose weights are never all in memory at once.

``presets``      a model's configuration, from a directory or by a preset's name
``task_type``    which class of transformers a configuration stands for
``meta_model``   the model itself, with parameters on the meta device
``structure``    its list of blocks, and what stands outside of it
``flops``        what a token costs
``miniature``    a tiny configuration of the same family
``checkpoint``   reading, converting, decompressing and writing weights
``adapters``     PEFT adapters: injected, initialised, saved, merged
``attention``    its memory, documents that share a row, and rows in chunks
``vision``       towers that turn images into input of a language model
"""
