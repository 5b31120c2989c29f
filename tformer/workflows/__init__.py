"""What spans several rooms: many trainings compared in one table."""
