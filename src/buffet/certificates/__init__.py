"""Proofs in files that `buffet_checker` checks on its own.

certificate    proves every task and writes the file
proof          a proof made again with numbers that can be stored
trees          the same by branch and bound, where the whole is not proven
naming         the sentence that a certificate is about
"""
