"""What puts the library behind other packages' attention. Nothing here is imported before it is asked for."""
