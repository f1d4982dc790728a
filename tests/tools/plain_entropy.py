"""Entropies of a toy source by plain sums over all its rows, contexts and targets (Prop. 3.1)."""

from __future__ import annotations

import itertools
import math

import torch


def table_of(source):
    """p(row) of every row, by plain sums over the paths of states."""
    start, move, emit = (
        table.tolist() for table in (source.initial_S, source.transition_SS, source.emission_SV)
    )
    table = {}
    for row in itertools.product(range(source.num_tokens), repeat=source.length):
        states = [[s for s in range(len(start)) if emit[s][v] > 0] for v in row]
        table[row] = sum(
            start[path[0]]
            * math.prod(move[a][b] for a, b in itertools.pairwise(path))
            * math.prod(emit[s][v] for s, v in zip(path, row))
            for path in itertools.product(*states)
        )
    return table


def conditional_entropy(table, target, context):
    """E[-log p(x^target | x^context)], each probability a sum over rows."""
    joint, given = {}, {}
    for row, p in table.items():
        z = tuple(row[j] for j in context)
        given[z] = given.get(z, 0) + p
        joint[(*z, row[target])] = joint.get((*z, row[target]), 0) + p
    return -sum(p * math.log(p / given[key[:-1]]) for key, p in joint.items() if p > 0)


def plain_entropy(source, order=None):
    """H^n: of MDM the mean over all targets and contexts of n places, or of an order."""
    table, places, found = table_of(source), range(source.length), []
    for n in places:
        pairs = [
            (target, context)
            for target in places
            for context in itertools.combinations([j for j in places if j != target], n)
        ]
        if order is not None:
            pairs = [(order[n], order[:n])]
        found.append(sum(conditional_entropy(table, *pair) for pair in pairs) / len(pairs))
    return torch.tensor(found, dtype=torch.float64)
