#include "cufile.hpp"

#include <cerrno>
#include <mutex>
#include <optional>
#include <system_error>

#include "error.hpp"

#ifdef ZS_HAS_CUFILE_H
#include <cufile.h>
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>

namespace zs::cufile {
namespace {

#define ZS_CUFILE_FUNCTIONS(X) \
  X(cuFileDriverOpen)          \
  X(cuFileDriverGetProperties) \
  X(cuFileHandleRegister)      \
  X(cuFileHandleDeregister)    \
  X(cuFileBufRegister)         \
  X(cuFileBufDeregister)       \
  X(cuFileRead)                \
  X(cuFileWrite)

struct Library {
#define ZS_FIELD(f) decltype(&::f) f = nullptr;
  ZS_CUFILE_FUNCTIONS(ZS_FIELD)
#undef ZS_FIELD
  decltype(&::cuFileGetVersion) cuFileGetVersion = nullptr;  // null where the library is older
  Facts facts;
};

constexpr unsigned kP2p = 1U << 4;  // CU_FILE_P2P_SUPPORTED, which older headers do not name

std::string word_for(int code) {
  return std::string(cufileop_status_error(static_cast<CUfileOpError>(code))) + " (" + std::to_string(code) +
         ")";
}

std::string word_for(const CUfileError_t& status) {
  std::string word = word_for(status.err);
  if (status.err == CU_FILE_CUDA_DRIVER_ERROR) word += ", CUDA error " + std::to_string(status.cu_err);
  return word;
}

Library load(std::vector<std::string> names) {
  if (const char* chosen = std::getenv("ZEROSTALL_LIBCUFILE"); chosen != nullptr && *chosen != '\0')
    names = {chosen};
  void* found = nullptr;
  std::string why;
  Library library;
  for (const std::string& name : names) {
    found = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);  // never closed: threads may be in it
    library.facts.library = name;
    if (found != nullptr) break;
    if (why.empty()) why = ::dlerror();
  }
  if (found == nullptr) throw Error(Kind::capability, "cuFile cannot be opened: " + why);
#define ZS_LOAD(f)                                                                 \
  library.f = reinterpret_cast<decltype(library.f)>(::dlsym(found, ZS_STRING(f))); \
  if (library.f == nullptr)                                                        \
    throw Error(Kind::capability, library.facts.library + " has no " ZS_STRING(f) ": it is too old");
  ZS_CUFILE_FUNCTIONS(ZS_LOAD)
#undef ZS_LOAD
  library.cuFileGetVersion =
      reinterpret_cast<decltype(library.cuFileGetVersion)>(::dlsym(found, "cuFileGetVersion"));
  const CUfileError_t status = library.cuFileDriverOpen();
  // Torch may have opened it for itself.
  if (status.err != CU_FILE_SUCCESS && status.err != CU_FILE_DRIVER_ALREADY_OPEN)
    throw Error(Kind::capability, "cuFile does not start: " + word_for(status));
  return library;
}

void look(Library& library) {
  // A newer library may fill in more than this header knows of.
  union {
    CUfileDrvProps_t known;
    std::byte room[4096];
  } facts;
  std::memset(&facts, 0, sizeof facts);
  if (const CUfileError_t status = library.cuFileDriverGetProperties(&facts.known);
      status.err != CU_FILE_SUCCESS)
    throw Error(Kind::capability, "cuFile does not say what it can do: " + word_for(status));
  library.facts.nvfs_major = facts.known.nvfs.major_version;
  library.facts.nvfs_minor = facts.known.nvfs.minor_version;
  library.facts.compat = (facts.known.nvfs.dcontrolflags >> CU_FILE_ALLOW_COMPAT_MODE & 1U) != 0;
  library.facts.p2p = (facts.known.fflags & kP2p) != 0;
  if (library.cuFileGetVersion != nullptr) library.cuFileGetVersion(&library.facts.version);
}

std::mutex mutex;
std::optional<Library> opened;  // once set, for good

const Library& library() {
  if (!opened) throw Error(Kind::usage, "cuFile is not open");
  return *opened;
}

uint64_t moved(ssize_t count, const char* function, uint64_t offset) {
  if (count >= 0) return static_cast<uint64_t>(count);
  const std::string where = std::string(function) + " failed at byte " + std::to_string(offset);
  if (count == -1) throw system_error(Kind::storage, where, errno);
  throw Error(Kind::storage, where + ": " + word_for(static_cast<int>(-count)), EIO);
}

}  // namespace

const Facts& open(const std::vector<std::string>& libraries) {
  const std::lock_guard lock(mutex);
  if (!opened) {
    Library fresh = load(libraries);
    look(fresh);
    opened.emplace(std::move(fresh));
  }
  return opened->facts;
}

Handle::Handle(int fd) {
  CUfileDescr_t file{};
  file.type = CU_FILE_HANDLE_TYPE_OPAQUE_FD;
  file.handle.fd = fd;
  if (const CUfileError_t status = library().cuFileHandleRegister(&handle_, &file);
      status.err != CU_FILE_SUCCESS)
    throw Error(Kind::capability, "cuFile refuses the file: " + word_for(status));
}

Handle::~Handle() {
  library().cuFileHandleDeregister(handle_);
}

uint64_t Handle::read(CUdeviceptr to, uint64_t nbytes, uint64_t offset) const {
  return moved(
      library().cuFileRead(handle_, reinterpret_cast<void*>(to), nbytes, static_cast<off_t>(offset), 0),
      "cuFileRead", offset);
}

uint64_t Handle::write(CUdeviceptr base, uint64_t within, uint64_t nbytes, uint64_t offset) const {
  return moved(library().cuFileWrite(handle_, reinterpret_cast<const void*>(base), nbytes,
                                     static_cast<off_t>(offset), static_cast<off_t>(within)),
               "cuFileWrite", offset);
}

Registration::Registration(std::shared_ptr<cuda::Context> context, CUdeviceptr at, uint64_t nbytes)
    : context_(std::move(context)), at_(at) {
  const cuda::Context::Current current(*context_);
  const CUfileError_t status = library().cuFileBufRegister(reinterpret_cast<const void*>(at), nbytes, 0);
  if (status.err != CU_FILE_SUCCESS) problem_ = word_for(status);
}

Registration::~Registration() {
  if (!problem_.empty()) return;
  try {
    const cuda::Context::Current current(*context_);
    library().cuFileBufDeregister(reinterpret_cast<const void*>(at_));
  } catch (const Error&) {
    // The process ends and the driver has gone before us.
  }
}

}  // namespace zs::cufile

#else  // no cufile.h where this was built

namespace zs::cufile {

const Facts& open(const std::vector<std::string>&) {
  throw Error(Kind::capability, "this build has no GPUDirect Storage: cufile.h was not there");
}
Handle::Handle(int) {
  throw Error(Kind::usage, "cuFile is not open");
}
Handle::~Handle() = default;
uint64_t Handle::read(CUdeviceptr, uint64_t, uint64_t) const {
  return 0;
}
uint64_t Handle::write(CUdeviceptr, uint64_t, uint64_t, uint64_t) const {
  return 0;
}
Registration::Registration(std::shared_ptr<cuda::Context> context, CUdeviceptr at, uint64_t)
    : context_(std::move(context)), at_(at), problem_("no cuFile") {}
Registration::~Registration() = default;

}  // namespace zs::cufile

#endif
