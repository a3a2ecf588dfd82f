// Forms a group: connects its ranks through the rendezvous store.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "bootstrap/mesh.h"
#include "group/connect_options.h"
#include "group/group.h"
#include "rendezvous/store.h"

namespace pycomm::group {

// Collective: every rank calls it with the same store, size and name. If all ranks reuse a name in
// one store, the group's name gets a number ("world", "world#2"), so that names are unique.
// `ranks`: the group's ranks() if it is not the world group; empty: the world group. `keys`: with
// what the group's keys in the store begin, which no other group uses, and which stay there; empty:
// the name, and keys are removed. Throws Timeout naming the missing ranks, PeerLost, or Mismatch
// (options differ).
std::shared_ptr<Group> connect(rendezvous::Store& store, ConnectOptions options,
                               std::vector<int> ranks = {}, std::string keys = {});

// Forms the mesh, creates the group and returns when all ranks have. `check_aborted` is
// MeshRequest's; an error that it throws takes precedence over a lost peer.
std::shared_ptr<Group> make_group(const ConnectOptions& options,
                                  const bootstrap::Exchange& exchange, std::vector<int> ranks,
                                  const bootstrap::CheckAborted& check_aborted = {});

// Throws InvalidArgument if `address`, as in ConnectOptions, matches no address of this host. Call
// it before using the store, so that each rank reports its own mistake.
void check_address(const std::string& address);

}  // namespace pycomm::group
