"""Messages between ranks: what every collective of the project is made of."""
