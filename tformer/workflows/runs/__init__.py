"""Runs on disk: find and summarise them (`summary`), show one in detail and compare several (`compare`)."""
