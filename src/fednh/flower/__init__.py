"""The same methods on Flower: sites that keep their data, and simulations that outgrow one machine."""
