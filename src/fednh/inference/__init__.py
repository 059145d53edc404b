"""What is done with trained models: predict, evaluate, personalise, export."""
