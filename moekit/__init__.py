"""moekit"""
