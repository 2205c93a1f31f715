#include "csrc/gpu/hip_driver.h"

#include <dlfcn.h>
#ifdef __linux__
#include <link.h>
#endif

#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>

namespace zyfa::gpu {
namespace {

// The part of HIP's C interface used here, declared as in hip_runtime_api.h of
// ROCm 6 and 7, so that building needs no HIP.
using HipError = int;
constexpr HipError kHipSuccess = 0;
constexpr HipError kHipOutOfMemory = 2;
constexpr HipError kHipNoDevice = 100;

// Keys of hipModuleLaunchKernel's `extra`.
void* const kLaunchBufferPointer = reinterpret_cast<void*>(1);
void* const kLaunchBufferSize = reinterpret_cast<void*>(2);
void* const kLaunchEnd = reinterpret_cast<void*>(3);

// hipDeviceProp_tR0600, whose layout its symbol's version fixes: 1472 bytes.
struct HipDeviceProperties {
  char before_units[388];
  int multi_processor_count;
  char before_arch[768];
  char gcn_arch_name[256];
  char rest[2048];  // more than is written
};
static_assert(offsetof(HipDeviceProperties, multi_processor_count) == 388);
static_assert(offsetof(HipDeviceProperties, gcn_arch_name) == 1160);

struct HipFunctions {
  const char* (*hipGetErrorName)(HipError);
  const char* (*hipGetErrorString)(HipError);
  HipError (*hipGetDeviceCount)(int*);
  HipError (*hipGetDevice)(int*);
  HipError (*hipSetDevice)(int);
  HipError (*hipGetDevicePropertiesR0600)(HipDeviceProperties*, int);
  HipError (*hipStreamGetDevice)(void*, int*);
  HipError (*hipModuleLoadData)(void**, const void*);
  HipError (*hipModuleGetFunction)(void**, void*, const char*);
  HipError (*hipModuleLaunchKernel)(void*, unsigned, unsigned, unsigned,
                                    unsigned, unsigned, unsigned, unsigned,
                                    void*, void**, void**);
};

class HipDriver final : public Driver {
 public:
  explicit HipDriver(const HipFunctions& functions) : hip_(functions) {}

  MaybeError StreamDevice(void* stream, int* device) const override {
    return Check("hipStreamGetDevice", hip_.hipStreamGetDevice(stream, device));
  }

  MaybeError Describe(int device, Device* description) const override {
    int count = 0;
    const HipError status = hip_.hipGetDeviceCount(&count);
    if (status == kHipNoDevice || (status == kHipSuccess && count == 0)) {
      return Error{ErrorKind::kUnavailable,
                   "hipGetDeviceCount: " + Text(kHipNoDevice) +
                       ". See that rocminfo lists the GPU, that the user may "
                       "open /dev/kfd and /dev/dri, and that "
                       "HIP_VISIBLE_DEVICES does not hide it"};
    }
    if (auto error = Check("hipGetDeviceCount", status)) return error;
    auto properties = std::make_unique<HipDeviceProperties>();
    if (auto error =
            Check("hipGetDeviceProperties",
                  hip_.hipGetDevicePropertiesR0600(properties.get(), device),
                  device)) {
      return error;
    }
    // Features follow the name, "gfx950:sramecc+:xnack-".
    const char* name = properties->gcn_arch_name;
    const std::string arch(name,
                           strnlen(name, sizeof(properties->gcn_arch_name)));
    description->arch = arch.substr(0, arch.find(':'));
    description->compute_units = properties->multi_processor_count;
    return std::nullopt;
  }

  MaybeError LoadModule(int device, const void* code,
                        void** module) const override {
    CurrentDevice current(*this, device);
    if (current.error()) return current.error();
    return Check("hipModuleLoadData", hip_.hipModuleLoadData(module, code),
                 device);
  }

  MaybeError GetFunction(int device, void* module, const Launch& launch,
                         void** function) const override {
    CurrentDevice current(*this, device);
    if (current.error()) return current.error();
    return Check(
        (std::string("hipModuleGetFunction of ") + launch.kernel).c_str(),
        hip_.hipModuleGetFunction(function, module, launch.kernel), device);
  }

  MaybeError LaunchFunction(int device, void* function, const Launch& launch,
                            void* stream) const override {
    CurrentDevice current(*this, device);
    if (current.error()) return current.error();
    size_t size = launch.args_size;
    void* extra[] = {kLaunchBufferPointer, const_cast<void*>(launch.args),
                     kLaunchBufferSize, &size, kLaunchEnd};
    return Check(
        (std::string("hipModuleLaunchKernel of ") + launch.kernel).c_str(),
        hip_.hipModuleLaunchKernel(function, launch.groups, 1, 1,
                                   launch.threads, 1, 1, launch.shared_bytes,
                                   stream, nullptr, extra),
        device);
  }

 private:
  // Makes a device the thread's current one for as long as it lives.
  class CurrentDevice {
   public:
    CurrentDevice(const HipDriver& driver, int device) : driver_(driver) {
      error_ = driver.Check("hipGetDevice",
                            driver.hip_.hipGetDevice(&previous_), device);
      if (error_ || previous_ == device) return;
      error_ = driver.Check("hipSetDevice", driver.hip_.hipSetDevice(device),
                            device);
      restores_ = !error_;
    }
    ~CurrentDevice() {
      if (restores_) (void)driver_.hip_.hipSetDevice(previous_);
    }
    CurrentDevice(const CurrentDevice&) = delete;
    CurrentDevice& operator=(const CurrentDevice&) = delete;

    const MaybeError& error() const { return error_; }

   private:
    const HipDriver& driver_;
    MaybeError error_;
    int previous_ = 0;
    bool restores_ = false;
  };

  std::string Text(HipError status) const {
    const char* text = hip_.hipGetErrorString(status);
    const char* name = hip_.hipGetErrorName(status);
    return std::string(text ? text : "unknown error") + " (" +
           (name ? name : "error") + ", " + std::to_string(status) + ")";
  }

  MaybeError Check(const char* call, HipError status, int device = -1) const {
    if (status == kHipSuccess) return std::nullopt;
    std::string message = std::string(call) + ": " + Text(status);
    if (device >= 0) message += " on device " + std::to_string(device);
    return Error{status == kHipOutOfMemory ? ErrorKind::kOutOfMemory
                                           : ErrorKind::kFailed,
                 message};
  }

  const HipFunctions hip_;
};

// The path of a libamdhip64 of whatever version that the process has loaded, or
// nothing.
std::string LoadedLibrary() {
  std::string path;
#ifdef __linux__
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* found) {
        const char* slash = std::strrchr(info->dlpi_name, '/');
        const char* name = slash != nullptr ? slash + 1 : info->dlpi_name;
        if (std::strncmp(name, "libamdhip64.so", 14) != 0) return 0;
        *static_cast<std::string*>(found) = info->dlpi_name;
        return 1;
      },
      &path);
#endif
  return path;
}

// Null, with the loader's words in `trouble`, where there is none.
void* OpenLibrary(std::string* trouble) {
  const auto open = [trouble](const char* path) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr && trouble->empty()) {
      const char* text = dlerror();
      *trouble = text != nullptr ? text : path;
    }
    return library;
  };
  const char* named = std::getenv("ZYFA_JAX_HIP_LIBRARY");
  if (named != nullptr && *named != '\0') return open(named);
  const std::string loaded = LoadedLibrary();
  if (!loaded.empty()) return open(loaded.c_str());
  for (const char* name : {"libamdhip64.so.7", "libamdhip64.so.6",
                           "libamdhip64.so", "/opt/rocm/lib/libamdhip64.so"}) {
    if (void* library = open(name)) return library;
  }
  return nullptr;
}

template <class Function>
void Find(void* library, const char* name, Function** function,
          std::string* missing) {
  *function = reinterpret_cast<Function*>(dlsym(library, name));
  if (*function == nullptr) *missing += std::string(" ") + name;
}

// Every function there is a symbol of.
std::string FindAll(void* library, HipFunctions* hip) {
  std::string missing;
#define ZYFA_FIND(name) Find(library, #name, &hip->name, &missing)
  ZYFA_FIND(hipGetErrorName);
  ZYFA_FIND(hipGetErrorString);
  ZYFA_FIND(hipGetDeviceCount);
  ZYFA_FIND(hipGetDevice);
  ZYFA_FIND(hipSetDevice);
  ZYFA_FIND(hipGetDevicePropertiesR0600);
  ZYFA_FIND(hipStreamGetDevice);
  ZYFA_FIND(hipModuleLoadData);
  ZYFA_FIND(hipModuleGetFunction);
  ZYFA_FIND(hipModuleLaunchKernel);
#undef ZYFA_FIND
  return missing;
}

}  // namespace

MaybeError OpenHip(const Driver** driver) {
  static auto* const mutex = new std::mutex;
  static const Driver* opened = nullptr;
  std::lock_guard<std::mutex> lock(*mutex);
  if (opened == nullptr) {
    std::string trouble;
    void* library = OpenLibrary(&trouble);
    if (library == nullptr) {
      return Error{ErrorKind::kUnavailable,
                   "HIP's library libamdhip64 is not here (" + trouble +
                       "). Install ROCm 6 or later or JAX's ROCm plugin, or "
                       "name the library in ZYFA_JAX_HIP_LIBRARY"};
    }
    HipFunctions functions;
    const std::string missing = FindAll(library, &functions);
    if (!missing.empty()) {
      dlclose(library);
      return Error{
          ErrorKind::kUnavailable,
          "HIP's library lacks" + missing + ". zyfa_jax takes ROCm 6 or later"};
    }
    opened = new HipDriver(functions);
  }
  *driver = opened;
  return std::nullopt;
}

}  // namespace zyfa::gpu
