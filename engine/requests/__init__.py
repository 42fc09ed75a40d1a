"""What clients send and are told: requests checked before they reach the engine, answers and errors made right."""
