// Waits until another thread or process changes a word of shared memory.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace pycomm::os {

// Returns at once if the word is not `seen`, else when wake_waiters() is called, after `limit`, or
// for no reason.
void wait_for_change(const std::atomic<uint32_t>& word, uint32_t seen,
                     std::chrono::nanoseconds limit);
// Call it after a change.
void wake_waiters(std::atomic<uint32_t>& word);

}  // namespace pycomm::os
