"""Measurement: how far a strategy is from exact on real data, and the choice by it."""
