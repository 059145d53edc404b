"""Tables, made from run folders only."""
