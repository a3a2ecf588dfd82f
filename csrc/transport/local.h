// Ranks as threads of one process: the same rings as between processes, with nothing to connect.
#pragma once

#include <memory>
#include <string>

#include "transport/transport.h"

namespace pycomm {

// The channel between `rank` and `peer` of the group called `meeting`, a name unique in the
// process. Whoever comes first makes both ends; a second call for the same end is an InternalError.
std::unique_ptr<Channel> local_channel(const std::string& meeting, int rank, int peer,
                                       size_t ring_bytes);

}  // namespace pycomm
