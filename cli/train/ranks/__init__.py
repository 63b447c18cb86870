"""Training by several ranks: how they meet, what each runs, in memory or out of core, and how they end."""
