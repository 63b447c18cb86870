"""``finetune --demo``: a real model learns a persona; where that cannot be had, a small one with random weights."""
