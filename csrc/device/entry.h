// Host functions of a stand-alone program of kernels that Python calls by name, in the emulator (flash_wmma.emulator)
// or, compiled by nvcc into a shared library, on a GPU:
//     void transpose(const float* in, float* out, int n) { launch(kernel, {...}, nullptr, in, out, n); }
//     const Entry kTranspose("transpose", transpose);
#pragma once

#include <cxxabi.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>

namespace flash_wmma {

/// One argument as Python passes it: a tensor's address, an integer or a floating number.
union Argument {
    void* pointer;
    std::int64_t integer;
    double real;

    template <class T>
    T as() const {
        if constexpr (std::is_pointer_v<T>) return static_cast<T>(pointer);
        else if constexpr (std::is_floating_point_v<T>) return static_cast<T>(real);
        else return static_cast<T>(integer);
    }
};

/// Registers a function under a name. Its parameters are pointers to plain types, integers and floating numbers.
class Entry {
  public:
    template <class... Params>
    Entry(const char* name, void (*function)(Params...)) {
        table()[name] = {
            sizeof...(Params), (std::string() + ... + (type_name<Params>() + '\n')),
            [function](const Argument* arguments) { call(function, arguments, std::index_sequence_for<Params...>()); }};
    }

    /// The types of an entry's parameters, a line each ("float const*"). Null for an unknown name.
    static const char* parameters(const std::string& name) {
        const auto found = table().find(name);
        return found == table().end() ? nullptr : found->second.types.c_str();
    }

    /// Throws std::invalid_argument for an unknown name or a wrong number of arguments.
    static void call(const std::string& name, const Argument* arguments, std::size_t count) {
        const auto found = table().find(name);
        if (found == table().end()) throw std::invalid_argument("no entry is called " + name);
        if (found->second.parameters != count)
            throw std::invalid_argument(name + " takes " + std::to_string(found->second.parameters) +
                                        " arguments, not " + std::to_string(count));
        found->second.function(arguments);
    }

  private:
    struct Row {
        std::size_t parameters;
        std::string types;
        std::function<void(const Argument*)> function;
    };
    static std::map<std::string, Row>& table() {
        static std::map<std::string, Row> rows;
        return rows;
    }
    template <class T>
    static std::string type_name() {
        const std::unique_ptr<char, void (*)(void*)> text(
            abi::__cxa_demangle(typeid(T).name(), nullptr, nullptr, nullptr), std::free);
        return text.get();
    }
    template <class... Params, std::size_t... I>
    static void call(void (*function)(Params...), const Argument* arguments, std::index_sequence<I...>) {
        function(arguments[I].template as<Params>()...);
    }
};

}  // namespace flash_wmma

extern "C" __attribute__((visibility("default"), used)) inline const char* flash_wmma_parameters(const char* name) {
    return flash_wmma::Entry::parameters(name);
}

/// Calls an entry. Returns null, or what went wrong: valid until this thread's next call.
extern "C" __attribute__((visibility("default"), used)) inline const char* flash_wmma_call(
    const char* name, const flash_wmma::Argument* arguments, std::size_t count) {
    static thread_local std::string error;
    try {
        flash_wmma::Entry::call(name, arguments, count);
        return nullptr;
    } catch (const std::exception& e) {
        error = e.what();
        return error.c_str();
    }
}
