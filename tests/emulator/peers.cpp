// Memory of a device that other devices access: all do within a process, where addresses are those
// of the host. Other processes map it. Part of the CUDA runtime of runtime.hpp.
#include <fcntl.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "runtime.hpp"

namespace {

struct Shared {
  int pid, descriptor;
  size_t bytes;
};
static_assert(sizeof(Shared) <= sizeof(cudaIpcMemHandle_t));

struct Sharing {
  std::mutex mutex;
  std::map<void*, Shared> exported;
  std::map<void*, size_t> imported;
};
Sharing& all_sharing = *new Sharing;  // never destroyed, and made early, as in runtime.cpp
Sharing& sharing() { return all_sharing; }

std::atomic<bool> refused = false;

// Replaces the pages of an allocation by those of a file with the same contents.
bool share(void* memory, Shared& shared) {
  shared = {getpid(), memfd_create("emulated-device", MFD_CLOEXEC),
            malloc_usable_size(memory) / emulator::kPage * emulator::kPage};
  return shared.descriptor >= 0 &&
         ftruncate(shared.descriptor, static_cast<off_t>(shared.bytes)) == 0 &&
         pwrite(shared.descriptor, memory, shared.bytes, 0) == static_cast<ssize_t>(shared.bytes) &&
         mmap(memory, shared.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
              shared.descriptor, 0) != MAP_FAILED;
}

}  // namespace

void emulator::refuse_peers(bool refuse) { refused = refuse; }

void emulator::end_sharing(void* memory) {
  const std::lock_guard lock(sharing().mutex);
  const auto found = sharing().exported.find(memory);
  if (found == sharing().exported.end()) return;
  const Shared shared = found->second;
  sharing().exported.erase(found);
  mmap(memory, shared.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
       0);
  close(shared.descriptor);
}

extern "C" {

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
  emulator::use_context();
  if (reinterpret_cast<uintptr_t>(memory) % emulator::kPage != 0) return cudaErrorInvalidValue;
  const std::lock_guard lock(sharing().mutex);
  auto [found, is_new] = sharing().exported.try_emplace(memory);
  if (is_new && !share(memory, found->second)) return cudaErrorMapBufferObjectFailed;
  *handle = {};
  std::memcpy(handle, &found->second, sizeof(Shared));
  return cudaSuccess;
}

// As in CUDA, of other processes only.
cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned flags) {
  emulator::use_context();
  Shared shared{};
  std::memcpy(&shared, &handle, sizeof shared);
  if (flags != cudaIpcMemLazyEnablePeerAccess) return cudaErrorInvalidValue;
  if (refused || shared.pid == getpid()) return cudaErrorInvalidResourceHandle;
  const std::string path =
      "/proc/" + std::to_string(shared.pid) + "/fd/" + std::to_string(shared.descriptor);
  const int descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return cudaErrorMapBufferObjectFailed;
  void* const mapped =
      mmap(nullptr, shared.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  close(descriptor);
  if (mapped == MAP_FAILED) return cudaErrorMapBufferObjectFailed;
  const std::lock_guard lock(sharing().mutex);
  sharing().imported[mapped] = shared.bytes;
  return *memory = mapped, cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void* memory) {
  emulator::use_context();
  const std::lock_guard lock(sharing().mutex);
  const auto found = sharing().imported.find(memory);
  if (found == sharing().imported.end()) return cudaErrorInvalidValue;
  munmap(memory, found->second);
  sharing().imported.erase(found);
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int device, unsigned flags) {
  emulator::use_context();
  int here = 0, count = 0;
  (void)cudaGetDevice(&here);
  (void)cudaGetDeviceCount(&count);
  const bool valid = flags == 0 && device != here && device >= 0 && device < count;
  return valid ? cudaSuccess : cudaErrorInvalidDevice;
}

}  // extern "C"
