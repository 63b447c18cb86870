"""What scripts/first_day.py does: its actions, and the models and data for them."""
