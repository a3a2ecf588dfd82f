// Exchanges the rank infos of a group through the rendezvous store.
#pragma once

#include <string>
#include <vector>

#include "core/deadline.h"
#include "group/connect_options.h"
#include "rendezvous/store.h"

namespace pycomm::group {

// The key of the secret in the store. `keys`: with what the group's keys begin.
std::string key_of_secret(const std::string& keys);

struct Exchanged {
  std::vector<std::string> infos;  // by rank
  std::string secret;              // the group's: that of `options`, or the one rank 0 stored
};

// Stores this rank's info and returns those of all ranks. Throws Timeout or PeerLost naming the
// ranks that are missing or died, the same on all ranks; Mismatch if a rank has other options.
Exchanged exchange_infos(rendezvous::Store& store, const ConnectOptions& options,
                         const std::string& keys, const std::string& mine,
                         const Deadline& deadline);
// Removes what this rank stored.
void remove_infos(rendezvous::Store& store, const ConnectOptions& options, const std::string& keys,
                  const Deadline& deadline);

}  // namespace pycomm::group
