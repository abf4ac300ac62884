"""Decisions, without clock or I/O: the time is an argument. The router and the simulator call the same code.

Most are pure functions over frozen structs. A policy that needs a memory is a small object that its caller feeds:
`Predictor`, `LoadSampler`, `ReuseCounter`, `PrefixIndex`, `EventTranslator`, `Shortlist`, or a `DecodeChoice`.
"""
