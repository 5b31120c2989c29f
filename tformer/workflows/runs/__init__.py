"""Runs on disk: find and summarize them (`summary`), show one in detail and compare several (`compare`)."""
