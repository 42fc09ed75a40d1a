"""Diagnoses why an engine ended, in words that a user can act on: a catalogue of patterns for its last output."""

from server.diagnosis.catalogue import Diagnosis, Ending, Fault, diagnose, load_catalogue

__all__ = ["Diagnosis", "Ending", "Fault", "diagnose", "load_catalogue"]
