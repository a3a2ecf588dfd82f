#include "os/aes_gcm.h"

#include <dlfcn.h>

#include <cstring>
#include <map>
#include <mutex>

#include "core/errors.h"

namespace pycomm::os {

// Functions as declared in <openssl/evp.h>.
struct CryptoLibrary {
  void* (*new_context)();
  void (*free_context)(void*);
  const void* (*aes_256_gcm)();
  int (*init)(void*, const void*, void*, const unsigned char*, const unsigned char*, int);
  int (*update)(void*, unsigned char*, int*, const unsigned char*, int);
  int (*final)(void*, unsigned char*, int*);
  int (*control)(void*, int, int, void*);
};

namespace {

constexpr int kGetTag = 0x10, kSetTag = 0x11;  // EVP_CTRL_AEAD_GET_TAG, EVP_CTRL_AEAD_SET_TAG

[[noreturn]] void throw_unsupported(const std::string& name, const std::string& why) {
  throw Unsupported("encrypt=True needs OpenSSL 3: cannot load " + name + " (" + why +
                    "); install it (on Debian: apt-get install libssl3) or omit encrypt");
}

template <typename F>
void find(void* handle, const std::string& name, const char* symbol, F& function) {
  function = reinterpret_cast<F>(::dlsym(handle, symbol));
  if (function == nullptr) throw_unsupported(name, std::string("missing function ") + symbol);
}

// Never unloaded: contexts may be freed while the process ends.
CryptoLibrary load(const std::string& name) {
  void* handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) throw_unsupported(name, ::dlerror());
  CryptoLibrary library{};
  find(handle, name, "EVP_CIPHER_CTX_new", library.new_context);
  find(handle, name, "EVP_CIPHER_CTX_free", library.free_context);
  find(handle, name, "EVP_aes_256_gcm", library.aes_256_gcm);
  find(handle, name, "EVP_CipherInit_ex", library.init);
  find(handle, name, "EVP_CipherUpdate", library.update);
  find(handle, name, "EVP_CipherFinal_ex", library.final);
  find(handle, name, "EVP_CIPHER_CTX_ctrl", library.control);
  return library;
}

const unsigned char* bytes(AesGcm::In in) {
  return reinterpret_cast<const unsigned char*>(in.data());
}
unsigned char* bytes(std::byte* out) { return reinterpret_cast<unsigned char*>(out); }

void require_success(int result, const char* what) {
  check(result == 1, std::string("OpenSSL failed: ") + what);
}

}  // namespace

const CryptoLibrary& crypto_library(const std::string& name) {
  static std::mutex mutex;
  static auto* loaded = new std::map<std::string, CryptoLibrary>;  // never destroyed, as above
  const std::scoped_lock lock(mutex);
  auto found = loaded->find(name);
  if (found == loaded->end()) found = loaded->emplace(name, load(name)).first;
  return found->second;
}

void AesGcm::Free::operator()(void* context) const { crypto_library().free_context(context); }

AesGcm::AesGcm(Direction direction, Key key)
    : library_(crypto_library()), direction_(direction), context_(library_.new_context()) {
  check(context_ != nullptr, "OpenSSL failed: EVP_CIPHER_CTX_new");
  set_key(key);
}

void AesGcm::set_key(Key key) {
  require_success(library_.init(context_.get(), library_.aes_256_gcm(), nullptr, key.data(),
                                nullptr, direction_ == Direction::encrypt ? 1 : 0),
                  "EVP_CipherInit_ex with a key");
}

void AesGcm::begin(const Nonce& nonce, In header) {
  require_success(library_.init(context_.get(), nullptr, nullptr, nullptr, nonce.data(), -1),
                  "EVP_CipherInit_ex with a nonce");
  int n = 0;
  require_success(
      library_.update(context_.get(), nullptr, &n, bytes(header), static_cast<int>(header.size())),
      "EVP_CipherUpdate of a header");
}

void AesGcm::encrypt(const Nonce& nonce, In header, In first, In second, std::byte* out) {
  begin(nonce, header);
  int n = 0;
  for (const In part : {first, second}) {
    if (part.empty()) continue;
    require_success(
        library_.update(context_.get(), bytes(out), &n, bytes(part), static_cast<int>(part.size())),
        "EVP_CipherUpdate");
    out += part.size();
  }
  require_success(library_.final(context_.get(), bytes(out), &n), "EVP_CipherFinal_ex");
  require_success(library_.control(context_.get(), kGetTag, kTagBytes, out), "the tag of a record");
}

bool AesGcm::decrypt(const Nonce& nonce, In header, In in, std::byte* out) {
  const size_t size = in.size() - kTagBytes;
  std::array<unsigned char, kTagBytes> tag{};
  std::memcpy(tag.data(), in.data() + size, kTagBytes);
  begin(nonce, header);
  int n = 0;
  require_success(
      library_.update(context_.get(), bytes(out), &n, bytes(in), static_cast<int>(size)),
      "EVP_CipherUpdate");
  require_success(library_.control(context_.get(), kSetTag, kTagBytes, tag.data()),
                  "the tag of a record");
  if (library_.final(context_.get(), bytes(out) + size, &n) == 1) return true;
  std::memset(out, 0, size);
  return false;
}

}  // namespace pycomm::os
