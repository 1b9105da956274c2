"""Proofs in files that `buffet_checker` checks on its own.

certificate    proves every task and writes the file
proof          a proof made again with numbers that can be stored
naming         the sentence that a certificate is about
"""
