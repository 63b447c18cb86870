"""``finetune plan``: whether a run fits, and how fast it will be.

The planners of ``fuyou`` and ``fcdp`` simulate it; here their results become text, JSON, and a page."""
