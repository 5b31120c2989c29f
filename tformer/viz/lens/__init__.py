"""The lens as a page, pictures, text and numbers (`lens`)."""
