"""Private: what forms a group: the rendezvous, the survivors' agreement, stored thresholds."""
