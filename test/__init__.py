"""Tests of whole servers."""
